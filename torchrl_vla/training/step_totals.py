"""What is measured in an optimizer step: added over micro-batches and over ranks."""

_EXTREMES = {"ratio_max": max, "ratio_min": min}


def combine(totals: dict[str, float], values: dict[str, float]) -> None:
    """Add the values of a micro-batch, or of a rank, to those before."""
    for name, value in values.items():
        if name not in totals:
            totals[name] = value
        elif name in _EXTREMES:
            totals[name] = _EXTREMES[name](totals[name], value)
        else:
            totals[name] += value


def derive(metrics: dict[str, float]) -> dict[str, float]:
    """Replace sums by the quantities that are reported."""
    square = metrics.pop("ratio_square_mean")
    metrics["effective_sample_size"] = metrics["ratio_mean"] ** 2 / max(square, 1e-12)
    num_masked = metrics.pop("num_masked_tokens")
    num_tokens = metrics.pop("num_tokens") + num_masked
    metrics["masked_fraction"] = num_masked / max(num_tokens, 1)
    low, high = metrics["clip_fraction_low"], metrics["clip_fraction_high"]
    metrics["clip_fraction"] = low + high
    return metrics
