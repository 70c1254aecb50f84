"""The mini world, our default: a toy in which the real method learns on a laptop in minutes.

A small agent learns to ask an environment of rules, whose facts it cannot know, one clear question at a time.

In reading order:

    world           films, people and cities, and the facts about them
    questions       seven kinds of questions about these facts, and their gold answers
    prompts         what a prompt to the environment asks for
    environment     the environment, rules in place of a large language model, which often err
    wordings        the sentences of its replies
    demonstrations  imperfect games, from which the agent learns the format
    agent           the agent, a Qwen3 of half a million parameters, which learned from them alone
    agents/         the trained weights of the agent of seed 0, before GRPO

The figures in the documents depend on the order in which each generator (`rng`) is drawn from: a draw more, a
draw less or another order gives another mini world.

This room may import the root, `programs`, `settings` and `model`. Only `agent` needs torch.
"""
