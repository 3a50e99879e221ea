"""Metrics: likelihood, perplexity, BLEU, chrF, TER, ROUGE, exact match, labels, calibration, significance."""
