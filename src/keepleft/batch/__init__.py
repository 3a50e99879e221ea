"""Batch jobs: files of many texts in, a folder of results out; a job that was stopped goes on."""
