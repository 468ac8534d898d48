"""Settings that test_engine.py and the process it starts, engine_probe.py, share."""

from schemas.settings import GenerationSettings

SETTINGS = GenerationSettings(batch=4, max_tokens=24, max_model_len=64, dtype="float32", kv_cache_mb=16, temperature=0.8)
