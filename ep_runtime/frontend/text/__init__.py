"""Between text and token ids: tokenizer, chat template, detokenizer, stop strings, reasoning, tool calls, grammars."""
