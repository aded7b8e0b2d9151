"""Run SGLang servers, and generate with them."""
