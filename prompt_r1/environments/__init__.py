"""Reply: ask an environment, pay for no call twice, and keep a budget.

In reading order:

    environment      `ask`: draws the environment of a question, and repeats a call until there is a reply
    sources          what one attempt comes to; objects in this process as environments
    endpoint         one request to an OpenAI-compatible server
    responses        read its response: status, error, completion, usage
    local            a Hugging Face model in this process
    journal          which calls were made, what they cost, and their replies
    budget           prices, and limits on calls and dollars
    specs            open environments by `--env SPEC`; which of them gets the key

It may import engine, miniworld, model, settings and programs.
"""
