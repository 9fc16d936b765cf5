"""Memory and disk that a run needs, and the override that makes it fit."""
