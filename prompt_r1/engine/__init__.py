"""Batched generation for many games at once, with a paged KV cache.

In reading order:

    engine            `generate`: tokens in, sampled tokens out; the loop of schedule, run and sample
    scheduler         which jobs run, how many tokens each computes, and which sequences lose their blocks
    kv_cache          sequences, their block tables, and the pool of blocks
    paged_attention   attention of new tokens over these blocks
    sampling          one token for each row of logits: temperature and top-p
    cuda_graphs       decode steps that a GPU replays
    compiled_forward  the forward over the cache, compiled into one graph for all batches
    model_check       packed rows and the cache against a model's own forward, when it is loaded

This room may import the root and `model`.
"""
