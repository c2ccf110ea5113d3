"""The manifests for Kubernetes: valid by its schemas, whole, confined, and right for what the server does."""

import atexit
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typer.main import get_group

import nearveil
from nearveil.cli import app
from nearveil.server.settings import Settings
from tests.service.test_deploy import parse_words, read_image_variables

yaml: Any = pytest.importorskip("yaml")
kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS = ["base", "overlays/folder", "overlays/production"]  # the last is in the page
LOADER = FOLDER / "overlays" / "folder" / "loader.yaml"
VERSIONS = ["1.30", "1.37"]  # fsGroupChangePolicy and all else is older
PAGE = (ROOT / "docs" / "howto" / "kubernetes.md").read_text(encoding="utf-8")


class Exact(BaseModel):
    """A part of a kustomization; an unknown field is refused, as in Kustomize."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ConfigMap(Exact):
    name: str
    behavior: Literal["create", "replace"] = "create"
    files: list[str] = Field(min_length=1)


class Image(Exact):
    name: str
    newName: str | None = None  # noqa: N815 - a field of Kustomize
    newTag: str | None = None  # noqa: N815
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None

    def rename(self, image: str) -> str:
        """Return the reference of an image as Kustomize writes it."""
        name, _, tag = image.partition(":")
        if name != self.name:
            return image
        suffix = f"@{self.digest}" if self.digest else f":{self.newTag or tag}"
        return f"{self.newName or name}{suffix}"


class Target(Exact):
    kind: str
    name: str


class Patch(Exact):
    target: Target
    path: str | None = None
    patch: str | None = None

    def load(self, folder: Path) -> "list[Operation]":
        """Return the operations, of a file or from here."""
        assert (self.path is None) != (self.patch is None)
        text = self.patch or (folder / str(self.path)).read_text(encoding="utf-8")
        return [Operation.model_validate(operation) for operation in yaml.safe_load(text)]


class Operation(Exact):
    op: Literal["add", "replace", "remove"]
    path: Annotated[str, Field(pattern=r"^(/\w+)+$")]
    value: Any = None


class Kustomization(Exact):
    """The fields that we use, as Kustomize defines them."""

    apiVersion: Literal["kustomize.config.k8s.io/v1beta1"]  # noqa: N815
    kind: Literal["Kustomization"]
    namespace: str
    resources: list[str]
    configMapGenerator: list[ConfigMap]  # noqa: N815
    images: list[Image] = []
    patches: list[Patch] = []


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def apply(operation: Operation, content: Any) -> None:
    """Apply one operation of a JSON patch (RFC 6902) to a mapping or a list; what it changes must exist."""
    *parents, last = [int(part) if part.isdigit() else part for part in operation.path[1:].split("/")]
    for part in parents:
        content = content[part]
    if operation.op == "add":
        assert isinstance(content, dict)
        assert last not in content
    else:
        assert content[last] is not None
    if operation.op == "remove":
        del content[last]
    else:
        content[last] = operation.value


def read(folder: Path) -> Kustomization:
    return Kustomization.model_validate(load(folder / "kustomization.yaml"))


def render_folder(folder: Path) -> dict[tuple[str, str], Any]:
    """Return the resources that `kubectl kustomize` would print, but for the hash in the names of ConfigMaps."""
    settings = read(folder)
    resources: dict[tuple[str, str], Any] = {}
    for path in settings.resources:
        source = (folder / path).resolve()
        if source.is_dir():
            resources |= render_folder(source)
        else:
            content = load(source)
            resources[content["kind"], content["metadata"]["name"]] = content
    for entry in settings.configMapGenerator:
        key = "ConfigMap", entry.name
        assert (key in resources) == (entry.behavior == "replace")
        data = {path: (folder / path).read_text(encoding="utf-8") for path in entry.files}
        resources[key] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": entry.name}, "data": data}
    for patch in settings.patches:
        for operation in patch.load(folder):
            apply(operation, resources[patch.target.kind, patch.target.name])
    for (kind, _), content in resources.items():
        if kind != "Namespace":
            content["metadata"]["namespace"] = settings.namespace
    (container,) = resources["Deployment", "nearveil"]["spec"]["template"]["spec"]["containers"]
    for image in settings.images:
        container["image"] = image.rename(container["image"])
    return resources


@cache
def prepare(name: str) -> Path:
    """Return the folder of a kustomization; the page has that of `overlays/production`."""
    if name != "overlays/production":
        return FOLDER / name
    copied = Path(tempfile.mkdtemp(prefix="nearveil-kubernetes-"))
    atexit.register(shutil.rmtree, copied)
    shutil.copytree(FOLDER, copied, dirs_exist_ok=True)
    folder = copied / name
    folder.mkdir()
    shutil.copy(copied / "base" / "nearveil.toml", folder)
    (text,) = re.findall(r"^```yaml\n(# deploy/kubernetes/overlays/production/.+?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
    return folder


def render(name: str) -> dict[tuple[str, str], Any]:
    return render_folder(prepare(name))


def find(name: str, kind: str) -> Any:
    (content,) = [content for (each, _), content in render(name).items() if each == kind]
    return content


def load_settings(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the settings of a server by its ConfigMap and the variables of its container."""
    (container,) = find(name, "Deployment")["spec"]["template"]["spec"]["containers"]
    variables = read_image_variables() | {entry["name"]: entry.get("value") for entry in container.get("env", ())}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    config = Path(variables.pop("NEARVEIL_CONFIG"))
    assert mounts[str(config.parent)] == "config"
    text = find(name, "ConfigMap")["data"][config.name]
    for mounted in ("tls.crt", "tls.key"):  # must exist where the settings are read
        assert mounts["/run/tls"] == "tls"
        text = text.replace(f"/run/tls/{mounted}", str(folder / mounted))
        (folder / mounted).touch()
    for variable, value in variables.items():
        if variable.startswith("NEARVEIL_"):
            monkeypatch.setenv(variable, value)
    (folder / config.name).write_text(text)
    return Settings.load(folder / config.name)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_schemas(version: str) -> None:
    resources = [content for name in KUSTOMIZATIONS for content in render(name).values()]
    for content in [*resources, load(LOADER)]:
        assert kubernetes_validate.validate(content, version, strict=True)


def test_the_validator_refuses_a_misspelt_field() -> None:
    deployment = find("base", "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kustomize_renders_the_same(name: str) -> None:
    command = [str(shutil.which("kubectl")), "kustomize", str(prepare(name))]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603
    text = re.sub(r"\b(nearveil-config)-[0-9a-z]{10}\b", r"\1", text)
    theirs = {(content["kind"], content["metadata"]["name"]): content for content in yaml.safe_load_all(text)}
    assert theirs == render(name)


def test_every_file_belongs_to_a_kustomization() -> None:
    listed = {LOADER}
    for folder in (path.parent for path in FOLDER.rglob("kustomization.yaml")):
        settings = read(folder)
        paths = [*settings.resources, *(path for entry in settings.configMapGenerator for path in entry.files)]
        paths += [patch.path for patch in settings.patches if patch.path]
        assert all((folder / path).exists() for path in paths)
        listed |= {folder / "kustomization.yaml", *(folder / path for path in paths)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == {path for path in listed if path.is_file()}


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_names_of_resources_fit(name: str) -> None:
    """Selectors, ports, volumes, accounts and claims name something that exists."""
    resources, deployment = render(name), find(name, "Deployment")
    labels, pod = deployment["spec"]["template"]["metadata"]["labels"], deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    selectors = [deployment["spec"]["selector"], find(name, "NetworkPolicy")["spec"]["podSelector"]]
    selectors += [find(name, "PodDisruptionBudget")["spec"]["selector"]]
    selectors += [each["labelSelector"] for each in pod["topologySpreadConstraints"]]
    selectors += [{"matchLabels": find(name, "Service")["spec"]["selector"]}]
    assert all(selector == {"matchLabels": labels} for selector in selectors)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [port["targetPort"] for port in find(name, "Service")["spec"]["ports"]] == ["https"]  # never `management`
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == ["/health", "/health", "/ready"]
    assert {probe["port"] for probe in probes} == {"management"} <= set(ports)
    rules = find(name, "NetworkPolicy")["spec"]["ingress"]
    assert [(port["port"], "from" in rule) for rule in rules for port in rule["ports"]] == [
        ("https", False), ("management", True)
    ]  # fmt: skip
    assert ("ServiceAccount", pod["serviceAccountName"]) in resources
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in resources
    claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert all(("PersistentVolumeClaim", claim["claimName"]) in resources for claim in claims)
    assert bool(claims) == (deployment["spec"]["replicas"] == 1)
    assert (deployment["spec"].get("strategy") == {"type": "Recreate"}) == bool(claims)
    (command,) = container["args"]
    assert parse_words(get_group(app).commands[command], command, [])["index"] is None


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_the_server_reads_its_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(name, tmp_path, monkeypatch)
    pod = find(name, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"https": settings.port, "management": settings.management_port}
    assert (settings.host, settings.management_host) == ("0.0.0.0",) * 2  # noqa: S104
    assert settings.tls_cert
    assert not settings.insecure
    # Two failed checks of readiness end before new connections are refused; SIGKILL comes after everything.
    probe = container["readinessProbe"]
    assert (probe["periodSeconds"] + probe["timeoutSeconds"]) * probe["failureThreshold"] < settings.shutdown_delay
    assert pod["terminationGracePeriodSeconds"] > settings.shutdown_delay + settings.shutdown_grace + 5
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300
    # Files that the server writes are in a volume that it may write; databases get their password.
    mounts = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    variables = {entry["name"] for entry in container.get("env", ())}
    for location in (settings.tokens, *(gallery.index for gallery in settings.galleries)):
        if "://" in location:
            assert {"PGPASSWORD", "PGSSLMODE", "PGSSLROOTCERT"} <= variables
            assert ":" not in location.partition("@")[0].partition("://")[2]
        else:
            assert Path(location).parents[-4] == Path("/var/lib/nearveil")
            assert "/var/lib/nearveil" in mounts
    assert mounts == {read_image_variables()["HOME"], "/tmp"}  # noqa: S108
    assert find(name, "Deployment")["spec"]["replicas"] == 1 or "://" in settings.tokens
    egress = [port["port"] for rule in find(name, "NetworkPolicy")["spec"]["egress"] for port in rule["ports"]]
    assert egress == ([53, 53, 5432] if "://" in settings.tokens else [])


@pytest.mark.parametrize("pod", [*KUSTOMIZATIONS, "loader"])
def test_every_pod_is_confined(pod: Any) -> None:
    pod = load(LOADER)["spec"] if pod == "loader" else find(pod, "Deployment")["spec"]["template"]["spec"]
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    user = pod["securityContext"]
    (steps,) = re.findall(r"--uid (\d+) --home-dir /var/lib/nearveil", (ROOT / "deploy" / "Containerfile").read_text())
    assert {user[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(steps)}
    assert user["runAsNonRoot"]
    assert user["fsGroupChangePolicy"] == "OnRootMismatch"  # else 0600 becomes 0660, and the store is refused
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert {"cpu", "memory"} <= set(container["resources"]["limits"]) & set(container["resources"]["requests"])
    image, _, version = container["image"].replace("@sha256", "").partition(":")
    assert image == "registry.example.org/nearveil"
    assert version in {nearveil.__version__, "0" * 64}
    for volume in pod["volumes"]:
        assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]
        assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440
        assert "hostPath" not in volume


def test_variables_of_a_service_would_be_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why pods have no links to services: one named `nearveil-server` would change the port, or stop the server."""
    monkeypatch.setenv("NEARVEIL_SERVER_PORT", "tcp://10.0.0.1:443")
    with pytest.raises(ValueError, match="port"):
        Settings.load()


def test_the_page_creates_every_secret() -> None:
    made = dict(re.findall(r"kubectl -n nearveil create secret (?:\w+) ([\w-]+) (.+)", PAGE.replace("\\\n", "")))
    pod = find("base", "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    keys: dict[str, set[str]] = {}
    for volume in pod["volumes"]:
        if "secret" in volume:
            items = volume["secret"].get("items", ())
            keys.setdefault(volume["secret"]["secretName"], set()).update(item["key"] for item in items)
    for entry in container["env"]:
        if "valueFrom" in entry:
            reference = entry["valueFrom"]["secretKeyRef"]
            keys.setdefault(reference["name"], set()).add(reference["key"])
    assert set(made) == set(keys)
    for secret, names in keys.items():
        assert all(f"={name}=" in made[secret] for name in names), secret


def test_the_page_names_existing_files() -> None:
    names = set(re.findall(r"deploy/kubernetes/[\w./-]*\w", PAGE))
    assert names
    assert all((ROOT / name).exists() for name in names if "production" not in name)
