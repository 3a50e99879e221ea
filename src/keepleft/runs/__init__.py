"""A training job, from plain files to a model directory; and exporting a model."""
