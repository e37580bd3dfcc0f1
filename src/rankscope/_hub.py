"""Whether the model hub answers: one quick question, where the libraries would retry for half a minute."""


def hub_problem(timeout: float = 5.0) -> str | None:
    """Return why the hub cannot be used, or ``None`` if it answers.

    Asked once through the hub library's own session, so that proxies and a mirror's address are honoured.

    Args:
        timeout: Seconds to wait.

    Example:
        >>> hub_problem(timeout=1e-9) is None
        False
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "offline mode is on (HF_HUB_OFFLINE)"
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception as error:  # the session's library, and so its errors, differ between the hub's versions
        return f"{constants.ENDPOINT} does not answer ({str(error) or type(error).__name__})"
    return None
