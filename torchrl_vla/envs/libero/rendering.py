"""Pictures: which headless OpenGL, one context per process, cameras on demand."""

import contextlib
import ctypes.util
import glob
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

LIBRARIES = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so"}
INSTALL = "on Debian or Ubuntu: apt-get install libegl1 libgl1 libosmesa6"


def has_gpu() -> bool:
    """Whether an NVIDIA device is visible to this process."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def choose_backend(
    environ: Mapping[str, str], *, gpu: bool, libraries: Mapping[str, bool]
) -> str:
    """The value of ``MUJOCO_GL``: the user's, else EGL on a GPU, else in software.

    OSMesa comes before EGL without a GPU: it needs no device node.

    Args:
        environ: environment variables.
        gpu: whether there is a GPU.
        libraries: whether the library of each of ``egl`` and ``osmesa`` is installed.

    Raises:
        ImportError: when the library is not installed, with what to install.

    Example:
        >>> choose_backend({}, gpu=False, libraries={"egl": True, "osmesa": True})
        'osmesa'
        >>> choose_backend({"MUJOCO_GL": "egl"}, gpu=False, libraries={"egl": True})
        'egl'
    """
    if chosen := environ.get("MUJOCO_GL"):
        if not libraries.get(chosen, chosen not in LIBRARIES):
            raise ImportError(
                f"MUJOCO_GL is {chosen!r} and {LIBRARIES[chosen]} is not installed; "
                f"unset it, or {INSTALL}"
            )
        return chosen
    for backend in ("egl", "osmesa") if gpu else ("osmesa", "egl"):
        if libraries.get(backend):
            return backend
    raise ImportError(
        f"LIBERO renders with headless OpenGL: neither {LIBRARIES['egl']} nor "
        f"{LIBRARIES['osmesa']} is installed; {INSTALL}"
    )


def set_up_rendering() -> str:
    """Set ``MUJOCO_GL`` for this process, unless the user did; returns it."""
    installed = {
        "egl": ctypes.util.find_library("EGL") is not None,
        "osmesa": ctypes.util.find_library("OSMesa") is not None,
    }
    backend = choose_backend(os.environ, gpu=has_gpu(), libraries=installed)
    os.environ["MUJOCO_GL"] = backend
    return backend


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set environment variables for a while; ``None`` takes one away."""
    before = {name: os.environ.get(name) for name in values}

    def write(variables: Mapping[str, str | None]) -> None:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    write(values)
    try:
        yield
    finally:
        write(before)


_CONTEXTS: dict[int | None, Any] = {}


def _gl_context(device_id: int | None) -> Any:
    """The OpenGL context of this process: a second one would cost as much memory.

    ``device_id`` counts EGL's devices. These are not CUDA's numbers, and
    ``CUDA_VISIBLE_DEVICES`` neither hides nor renumbers them.
    """
    if device_id in _CONTEXTS:
        return _CONTEXTS[device_id]
    if _CONTEXTS:
        raise ValueError(
            f"render_gpu_device_id is {device_id}, and this process renders on "
            f"{next(iter(_CONTEXTS))} already; use one device per process"
        )
    backend = os.environ.get("MUJOCO_GL", "")
    chosen = os.environ.get("MUJOCO_EGL_DEVICE_ID")
    if device_id is not None:
        chosen = str(device_id)
    # By name: mujoco.gl_context stays with what MUJOCO_GL was at its first import.
    module = backend if backend in LIBRARIES else "gl_context"
    try:
        with environment(MUJOCO_EGL_DEVICE_ID=chosen):
            backend_module = importlib.import_module(f"mujoco.{module}")
            _CONTEXTS[device_id] = backend_module.GLContext(640, 480)
    except Exception as error:
        raise RuntimeError(
            f"no OpenGL context could be made with MUJOCO_GL={backend!r}, which needs "
            f"{LIBRARIES.get(backend, 'a display')}, and render_gpu_device_id="
            f"{device_id}: {error}. Try another device or MUJOCO_GL=osmesa; {INSTALL}"
        ) from error
    return _CONTEXTS[device_id]


_ANTIALIAS: set[bool] = set()


def _check_antialias(antialias: bool) -> None:
    """Refuse a second setting: it would change the pictures of those before."""
    if (not antialias) in _ANTIALIAS:
        raise ValueError(
            f"antialias is {antialias}, and this process renders with {not antialias} "
            "already; use one setting per process"
        )
    _ANTIALIAS.add(antialias)


class Renderer:
    """Pictures of the states of one compiled model, as robosuite draws them.

    Args:
        model: ``mujoco.MjModel``; its offscreen buffer is enlarged if needed.
        height, width: of the largest picture, px.
        antialias: take the model's number of samples per pixel (robosuite: 4); else
            one, at half the time in software.
        device_id: EGL device, ``None`` for the default. One per process.

    Raises:
        ValueError: for another ``antialias`` or device than the process has already.
        RuntimeError: when no OpenGL context can be made.
    """

    def __init__(
        self,
        model: Any,
        height: int,
        width: int,
        *,
        antialias: bool = True,
        device_id: int | None = None,
    ) -> None:
        import mujoco

        self._gl = _gl_context(device_id)
        self._gl.make_current()
        size = model.vis.global_
        size.offheight, size.offwidth = (
            max(size.offheight, height),
            max(size.offwidth, width),
        )
        _check_antialias(antialias)
        if not antialias:
            model.vis.quality.offsamples = 0
        self._model = model
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision meshes
        self._options.geomgroup[1] = 1
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturbation = mujoco.MjvPerturb()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)

    def render(self, data: Any, camera: int, height: int, width: int) -> np.ndarray:
        """A picture, uint8 ``[height, width, 3]``, upright and as policies see it.

        OpenGL's rows run upwards; the orientation that policies are trained on is
        rotated by 180 degrees.
        """
        import mujoco

        self._gl.make_current()
        # Each model has a framebuffer; another one's may have been drawn to last.
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._camera.fixedcamid = camera
        mujoco.mjv_updateScene(
            self._model,
            data,
            self._options,
            self._perturbation,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        viewport = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(viewport, self._scene, self._context)
        pixels = np.empty((height, width, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(pixels, None, viewport, self._context)
        return pixels[::-1, ::-1]

    def close(self) -> None:
        """Free what the model takes of the OpenGL context."""
        self._gl.make_current()
        self._context.free()
