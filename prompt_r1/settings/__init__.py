"""Settings: the knobs of agents, environments and training, and where the value of a setting comes from.

In reading order:

    fields      a setting is a field of a dataclass: its default, its range, its line in the help; YAML files
    flags       a flag for each setting; --help and --help-all
    agent       the settings of an agent, its game and its environment
    train       the settings of a training; the presets mini, small and paper
    functions   the functions and objects that a user names as MODULE:NAME

Every program has a config of its settings, in `settings.py` of its room. Only the config of train.py stands
here, because `pair` reads its presets, and may not import `training`.

Flags override a preset or a YAML file, which overrides the defaults. Here the values are checked. The user's
functions, files, folders and keys are checked in the rooms that use them: by `preflight.py` in `training` and
`evaluation`, and by `settings.py` for the other programs.

This room may import the root and `programs`.
"""
