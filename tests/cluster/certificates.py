"""Certificates for the processes of a cluster."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple, Self

import pytest


class Certificates(NamedTuple):
    """Files of an authority, of a certificate that it signed for this machine, and of its key."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Write them."""
        x509 = pytest.importorskip("cryptography.x509")
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "worker")]
        now = datetime.datetime.now(datetime.UTC)
        made = []
        for name, key, is_authority in zip(names, keys, (True, False), strict=True):
            builder = x509.CertificateBuilder().subject_name(name).issuer_name(names[0]).public_key(key.public_key())
            builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(1))
            builder = builder.not_valid_after(now + datetime.timedelta(1))
            builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            made.append(
                builder.add_extension(x509.SubjectAlternativeName([host]), critical=False).sign(
                    keys[0], hashes.SHA256()
                )
            )
        pem = serialization.Encoding.PEM
        places = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        plain = (serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
        texts = made[0].public_bytes(pem), made[1].public_bytes(pem), keys[1].private_bytes(pem, *plain)
        for place, text in zip(places, texts, strict=True):
            place.write_bytes(text)
        return cls(*places)
