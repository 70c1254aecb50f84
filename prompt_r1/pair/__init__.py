"""Ask: load an agent with its environment, and play one question, for training, evaluation or a person.

In reading order:

    named_agent      from the name of an agent to its folder, and to the settings by which it plays
    settings         the settings of infer.py and of the server, and their checks before torch is imported
    dialogue         show a game as text while it is played
    agent            a loaded agent; `play_question`, by which training, evaluation and people play games
    api              open a pair of agent and environment: `prompt_r1.load(…).ask("…")` and `stream`
    chat_format      OpenAI's chat completions: read a request, write a game or an error
    server           answer them over HTTP; chat.html is its page to chat with
    __main__         the program, `python -m prompt_r1.pair`

This room may import all rooms but `training` and `evaluation`.
"""
