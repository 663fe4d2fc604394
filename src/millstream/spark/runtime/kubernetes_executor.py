"""The process of a pod that Spark on Kubernetes creates: the JVM of an executor.

Spark gives an executor's container one argument, ``executor``, and everything else by the environment; what the
container then starts is up to its image. Here it is the Java of the driver's image, with the jars of its PySpark, so an
image with Millstream is an image of executors. Only the command and the environment are made here: who starts
it is ``cli/executor.py``.

Source: Spark's ``BasicExecutorFeatureStep`` (which variables there are) and ``KubernetesExecutorBackend`` (which
arguments it takes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from millstream.errors import ConfigError
from millstream.spark.runtime.internals import spark_home
from millstream.spark.runtime.java import Java

_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
# An argument of the backend, and the variable that Spark sets for it.
_ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
_MEMORY = "SPARK_EXECUTOR_MEMORY"
_JVM_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)")


def executor_command(env: Mapping[str, str], java: Java) -> list[str]:
    """Return the command line of an executor's JVM.

    Args:
        env: The environment of the container.
        java: The Java to run.

    Raises:
        ConfigError: a variable that Spark sets is missing.

    """
    missing = [name for name in (*_ARGUMENTS.values(), _MEMORY) if not env.get(name)]
    if missing:
        raise ConfigError(
            f"the environment lacks {', '.join(missing)}. Spark sets them in the pods that it creates: "
            "don't start an executor by hand, but give a run --master k8s://…"
        )
    backend = [word for argument, name in _ARGUMENTS.items() for word in (argument, env[name])]
    memory = env[_MEMORY]
    command = [str(java.home / "bin" / "java"), *_jvm_options(env)]
    return [*command, f"-Xms{memory}", f"-Xmx{memory}", "-cp", _class_path(env), _BACKEND, *backend]


def _jvm_options(env: Mapping[str, str]) -> list[str]:
    """Return the options that Spark numbers, in their order: a later one overrides an earlier one."""
    numbered = [
        (int(found[1]), env[name]) for name in env if (found := _JVM_OPTION.fullmatch(name))
    ]
    return [option for _, option in sorted(numbered)]


def _class_path(env: Mapping[str, str]) -> str:
    """Return Spark's settings and jars, in the order of Spark's own image."""
    configured = [
        env.get(name) for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "SPARK_CLASSPATH")
    ]
    jars = str(spark_home(env) / "jars" / "*")
    return ":".join(filter(None, [*configured, jars, env.get("SPARK_EXTRA_CLASSPATH")]))
