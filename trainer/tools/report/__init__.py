"""Reads the logs of training runs, finished or not, of this trainer and others, and reports what
happened. It needs only the log files.
"""
