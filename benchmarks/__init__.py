"""Measurements on a GPU: cases as data, runners, checked-in rows, and the report that makes tables
of them.
"""
