"""Packaging of tvmcap.

`tvmcap/schedules`, `tvmcap/tuning_logs` and `tvmcap/cpp` are links to the folders at the top.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "tvmcap" / "versions.py").read_text()).group(1)

CUDA = [  # nvcc 13.0 and what it needs, so that a machine without the toolkit can build for a GPU
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
]

REPORT = ["matplotlib>=3.10,<4"]  # the figures of `tvmcap report -o FILE`

SERVE = [  # the HTTP server of `tvmcap serve`
    "uvicorn>=0.40,<1",
    "starlette>=1.0,<2",
    "httptools>=0.6.3",
    "uvloop>=0.21",
    "prometheus-client>=0.20",
]

setup(
    name="tvmcap",
    version=VERSION,
    description="One PyTorch function in; one tuned, verified, deployable library out",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["tvmcap", "tvmcap.*"]),
    package_data={"tvmcap": ["py.typed", "tuning_logs/**/*", "cpp/*"]},
    install_requires=[
        "apache-tvm==0.27.0.post1",
        "apache-tvm-ffi>=0.1.14.post0,<0.1.15",  # 0.1.15 crashes this TVM in its first save_json
        "torch>=2.11,<2.14",
        "xgboost>=3.2,<4",
        "numpy>=1.26",
        "ml_dtypes",
        "rich>=13",
        "platformdirs>=4",
        "filelock>=3.12",
        "cloudpickle",
        "psutil",
        "tomli; python_version < '3.11'",
    ],
    extras_require={
        "cuda": CUDA,
        "report": REPORT,
        "serve": SERVE,
        "dev": [
            *CUDA,
            *REPORT,
            *SERVE,
            "tritonclient[http]>=2.60",  # what the server is tested with
            "pytest>=8",
            "pytest-xdist",
            "ruff==0.17.6",
            "mypy==2.4.1",
            "import-linter>=2.3",
            "pre-commit",
            "safetensors",
            "torchao==0.18.0",  # what the accuracy of quantization is compared with
            "tornado",
        ],
    },
    entry_points={"console_scripts": ["tvmcap = tvmcap.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3",
    ],
)
