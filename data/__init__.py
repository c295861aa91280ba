"""From any text to batches of tokens.

sources.py reads text, tokenizer.py makes and loads tokenizers, encoding.py turns text into ids and back, corpus.py
writes files of ids and opens them, token_files.py opens those of others, batches.py draws batches. The command is
prepare.py.
"""
