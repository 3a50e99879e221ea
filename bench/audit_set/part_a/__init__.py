"""Part A: masks, paths, models without attention, interfaces."""
