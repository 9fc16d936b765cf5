"""Plan the memory and disk space of a run, and find the override that makes it fit."""
