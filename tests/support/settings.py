"""The settings of a command line of train.py, before the checks of files, folders, keys and functions."""

from prompt_r1.settings import train
from prompt_r1.settings.flags import given_values


def train_config(arguments: list[str]) -> train.TrainConfig:
    """The config of a command line."""
    return train.train_config(given_values(train.TrainConfig, arguments, presets=train.PRESETS))
