"""Reads the logs of finished or running trainings, ours and others', and says what happened.
Works on files alone.
"""
