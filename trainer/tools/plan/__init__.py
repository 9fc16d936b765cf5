"""Plan the memory and disk of a run, and find the override that makes it fit."""
