"""A broker that takes nobody without TLS and a password, and lets nobody without rights do anything."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deploy.jars import java_home, kafka_jars
from deploy.services import kafka_properties
from schemas.settings import StackSettings
from tests.integration.conftest import free_ports

OWNER, STRANGER = "pipelinerl", "stranger"  # users; each one's password is its name, backwards


def password(user: str) -> str:
    return user[::-1]


def _key_and_certificate(name: str, issuer=None, ca: bool = False):
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer[1].subject if issuer else subject)
               .public_key(key.public_key()).serial_number(x509.random_serial_number())
               .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
               .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
               .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False))
    return key, builder.sign(issuer[0] if issuer else key, hashes.SHA256())


@contextlib.contextmanager
def secure_broker(folder: Path) -> Iterator[dict[str, str]]:
    """Settings of the owner as flags, `kafka.*`; the stranger's password lies beside the owner's. Ends with the block."""
    authority = _key_and_certificate("authority", ca=True)
    key, certificate = _key_and_certificate("broker", authority)
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(authority[1].public_bytes(pem))
    (folder / "broker.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()) + certificate.public_bytes(pem))
    for user in (OWNER, STRANGER):
        (folder / user).write_text(password(user) + "\n")
    port, controller = free_ports(2)
    users = " ".join(f'user_{u}="{password(u)}"' for u in ("broker", OWNER, STRANGER))
    properties = kafka_properties(StackSettings(dir=folder, kafka_port=port, kafka_controller_port=controller)) | {
        "listeners": f"SASL_SSL://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"SASL_SSL://127.0.0.1:{port}", "inter.broker.listener.name": "SASL_SSL",
        "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN", "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
                                                         f'username="broker" password="{password("broker")}" {users};',
        "ssl.keystore.type": "PEM", "ssl.keystore.location": folder / "broker.pem",
        "ssl.truststore.type": "PEM", "ssl.truststore.location": folder / "ca.pem",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:broker;User:{OWNER};User:ANONYMOUS",  # anonymous: the controller's own listener
    }
    (folder / "server.properties").write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
    java = [str(java_home() / "bin" / "java"), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", ":".join(map(str, kafka_jars()))]
    with (folder / "broker.log").open("w") as log:
        subprocess.run([*java, "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAA", "-c", str(folder / "server.properties")],
                       stdout=log, stderr=log, check=True)
        broker = subprocess.Popen([*java, "kafka.Kafka", str(folder / "server.properties")], stdout=log, stderr=log)
    try:
        yield {"kafka.bootstrap": f"127.0.0.1:{port}", "kafka.security_protocol": "SASL_SSL", "kafka.sasl_mechanism": "PLAIN",
               "kafka.sasl_username": OWNER, "kafka.sasl_password_file": str(folder / OWNER), "kafka.ssl_cafile": str(folder / "ca.pem")}
    finally:
        broker.kill()
        broker.wait()
