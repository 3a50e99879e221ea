"""SVG pictures: beam trees, next-token distributions, cross-attention alignments, charts."""
