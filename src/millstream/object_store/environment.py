"""What each kind of store reads from the environment, for messages: which variables to look at when a request fails.

obstore reads the variables itself, but for those of HDFS. Where they give no credentials, it asks the metadata service of the cloud's machine for
some, at an address that is the same in all clouds; on a machine elsewhere nothing answers there.
"""

from __future__ import annotations

from dataclasses import dataclass

WEBHDFS = "MILLSTREAM_WEBHDFS"
_METADATA_SERVICE = ("169.254.169.254", "metadata.google.internal")
_NO_CONTAINER = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")


@dataclass(frozen=True)
class StoreEnvironment:
    """``container``: what objects are in. The others name variables: where the store is, and who asks."""

    container: str
    where: str
    credentials: str


_OF_SCHEME = {
    "s3": StoreEnvironment(
        "bucket", "AWS_REGION and AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ),
    "gs": StoreEnvironment(
        "bucket", "GOOGLE_BASE_URL", "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT_KEY"
    ),
    "az": StoreEnvironment(
        "container",
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ENDPOINT",
        "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY or AZURE_CLIENT_ID with AZURE_CLIENT_SECRET and AZURE_TENANT_ID",
    ),
    "hdfs": StoreEnvironment(
        "folder", WEBHDFS, "HADOOP_USER_NAME, or for Kerberos KRB5CCNAME and KRB5_CLIENT_KTNAME"
    ),
}


def environment_of(url: str) -> StoreEnvironment:
    """Return what the store of a URL reads from the environment."""
    return _OF_SCHEME[url.partition("://")[0]]


def lacks_container(error: BaseException) -> bool:
    """Return whether the store says that the URL's bucket or container is not there."""
    return any(said in str(error) for said in _NO_CONTAINER)


def lacks_credentials(error: BaseException) -> bool:
    """Return whether the environment has no credentials, and the machine's cloud gave none."""
    return any(address in str(error) for address in _METADATA_SERVICE)
