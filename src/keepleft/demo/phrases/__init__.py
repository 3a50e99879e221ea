"""A small grammar of everyday English, French and Hindi: sentence pairs to train a translator on.

Every English sentence has one translation. No sentence ends in punctuation, questions included. *You* is
*tu* in French and *आप* in Hindi. *I*, *you*, *we* and *they* are masculine, and so are the plurals of mixed
company: *I am happy* is *Je suis heureux*, *I am going* is *मैं जा रहा हूँ*. French asks with *est-ce que*;
Hindi honours parents with the plural.
"""

from keepleft.demo.phrases.corpus import pairs, split

__all__ = ["pairs", "split"]
