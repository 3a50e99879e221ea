"""Pictures as SVG: attention, next-token distributions, beam trees, curves."""
