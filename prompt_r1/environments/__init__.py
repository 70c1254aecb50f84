"""Reply: ask an environment, pay for no call twice, and keep a budget.

In reading order:

    sources          what one attempt of a source returns or raises
    budget           prices, and limits on calls and dollars
    journal          which calls were made, what they cost, and their replies
    environment      `ask`: draws the environment of a question, and sends the request until there is a reply
    route            which of several environments a question asks
    time_limit       how long a request may take
    check            finds a wrong URL, key, model or setting by one request at the start
    endpoint         an OpenAI-compatible server as a source: one request
    responses        reads the server's response: status, error, completion, usage
    local            a Hugging Face model in this process as a source
    own              an object of the user as a source
    reply_text       cuts thinking and end tokens from what a model wrote
    specs            opens environments by `--env SPEC`, and decides which of them gets the key
    asking           how an environment is asked for the answer itself, without an agent

This room may import the root, `programs`, `settings`, `model`, `engine` and `miniworld`.
"""
