"""The agent's weights on unmodified Hugging Face models: tokens in, log-probabilities out.

In reading order:

    packing       games as one row of tokens without padding. The games of a question share their opening
    attention     the attention function that Hugging Face models call in place of their own
    policy        log-probabilities of the agent's tokens in a packed row, computed in chunks
    lora          low-rank adapters beside frozen weights
    machine       the device, cores, threads and memory that this process may use
    loading       models and tokenizers from folders and the Hub, or the reason why they are refused
    model_digest  a digest of a model that reads little of its weights
    gguf          GGUF files, which are converted into folders
    distributed   ranks, and what they exchange
    sharding      weights that are sharded over the ranks
    fine_tuning   supervised training, for `miniworld` and `training`

This room may import the root, `programs` and `settings`.
"""
