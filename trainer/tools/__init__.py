"""Optional commands that measure or read the results of training. No command imports another."""
