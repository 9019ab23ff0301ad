"""Language models on Count3 and Count2: prompts, scores of what they write, and OpenAI's service.

Nothing here imports torch; `openai` is imported where it is used.
"""
