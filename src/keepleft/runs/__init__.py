"""One training job, from plain files to a model directory."""
