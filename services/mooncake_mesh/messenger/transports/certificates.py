"""A certificate for the life of a receiver, signed by itself: the only module that imports cryptography.

Nobody looks at its name and its dates: a sender knows it by its SHA-256 (see tls.py).
"""

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from mooncake_mesh.messenger.transports.tls import Identity, identity


def new_identity() -> Identity:
    """A fresh key (P-256, the curve that OpenSSL is fastest with) and its certificate; in memory only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mooncake-mesh")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))  # RFC 5280: no end is meant
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return identity(certificate.public_bytes(Encoding.DER), certificate.public_bytes(Encoding.PEM) + secret)
