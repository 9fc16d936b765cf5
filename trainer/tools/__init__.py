"""Optional commands: each measures or reads what the trainer makes, and none knows another."""
