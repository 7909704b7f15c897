"""Measurements, all reported in one form: see `report`."""
