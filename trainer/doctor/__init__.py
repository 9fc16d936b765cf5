"""What can be known before a run is started, as one list (floor 5)."""
