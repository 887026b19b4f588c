"""The controller: chooses the settings of a round's plan from logged measurements.

Pure functions without torch, clock or network. The coordinator calls them and logs the result.
"""
