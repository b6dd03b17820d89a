# Sourced by scripts/serve and scripts/test: the virtual environment and what goes into it.
#
# Knows nothing of models, serving or tests. Reads PYTHON, NEOJAX_EXTRA and JAX_VERSION.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}

# Sets `python` (the interpreter to build on) and `venv` (the environment's directory).
choose_python() {
  local wanted=${PYTHON:-python3}
  python=$(command -v "$wanted") ||
    die "PYTHON=$wanted is not a program. Name an interpreter, for example PYTHON=python3.12 $0"
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    die "$python does not start. Name another, for example PYTHON=python3.12 $0"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "neojax needs Python 3.11 or later, and $wanted is $version." \
      "Name a newer one, for example PYTHON=python3.12 $0"
  venv=$root/.venv
  [ -z "${PYTHON:-}" ] || venv=$root/.venv-$version
}

# Prints the major number of the CUDA release that the driver of this machine serves, or nothing.
cuda_major() {
  local driver
  if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null); then
    driver=${driver%%.*}
    if [ "${driver:-0}" -ge 580 ] 2>/dev/null; then
      echo 13
    elif [ "${driver:-0}" -ge 525 ] 2>/dev/null; then
      echo 12
    fi
    return
  fi
  "$python" - <<'PY'
import ctypes

try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit from None
version = ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
    if version.value >= 12000:
        print(min(version.value // 1000, 13))
PY
}

# Prints the extra that fits this machine: cpu, cuda12 or cuda13. NEOJAX_EXTRA overrides.
device_extra() {
  case ${NEOJAX_EXTRA:-} in
  cpu | cuda12 | cuda13) echo "$NEOJAX_EXTRA" ;;
  "")
    local major
    major=$(cuda_major)
    if [ -n "$major" ]; then echo "cuda$major"; else echo cpu; fi
    ;;
  *) die "NEOJAX_EXTRA=$NEOJAX_EXTRA is not one of cpu, cuda12, cuda13" ;;
  esac
}

# What installing for extra $1 downloads: sizes of the wheels for Linux x86-64 and Python 3.11 as of
# 2026-11.
download_size() {
  case $1 in
  cpu) echo "220 MB" ;;
  cuda12) echo "3.4 GB" ;;
  cuda13) echo "2.7 GB" ;;
  esac
}

# pip, with a bar, once more after a failure: a dropped connection is the usual one.
pip_install() {
  local pip=("$venv/bin/python" -m pip install --progress-bar on --disable-pip-version-check)
  "${pip[@]}" "$@" && return
  say "pip failed; trying once more"
  "${pip[@]}" "$@"
}

# Prints the requirements of pyproject.toml: to run, to build, and of the extras named.
requirements() {
  "$python" - "$root/pyproject.toml" "$@" <<'PY'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    pyproject = tomllib.load(file)
project = pyproject["project"]
lines = [*pyproject["build-system"]["requires"], "cmake>=3.26", "ninja>=1.11"]
lines += project["dependencies"]
for extra in sys.argv[2:]:
    if extra != "cpu":
        lines += project["optional-dependencies"][extra]
print("\n".join(lines))
PY
  [ -z "${JAX_VERSION:-}" ] || echo "jax==$JAX_VERSION"
}

# Prints a hash of everything that the native library and the editable install come from.
native_key() {
  (
    cd "$root"
    echo "$root"
    find ffi CMakeLists.txt pyproject.toml -type f -print0 | sort -z | xargs -0 sha256sum
  ) | sha256sum
}

# True when file $1 holds the line $2.
is_stamped() { [ -f "$1" ] && grep -qxF -e "$2" "$1"; }

create_venv() {
  local version
  version=$("$python" -c 'import sys; print(sys.version.replace("\n", " "))')
  is_stamped "$venv/.neojax/python" "$version" && [ -x "$venv/bin/python" ] && return
  if [ -e "$venv/bin/python" ] && [ ! -d "$venv/.neojax" ]; then
    die "$venv was not made by this script. Move it away, or use another: PYTHON=$python $0"
  fi
  say "Creating $venv with $python"
  "$python" -m venv --clear "$venv" ||
    die "$python cannot create an environment. On Debian: apt-get install python3-venv"
  mkdir -p "$venv/.neojax"
  printf '%s\n' "$version" >"$venv/.neojax/python"
}

# The stamp of what is installed: one file for each state of pyproject.toml, a line for each extra.
requirements_stamp() {
  local key
  key=$(requirements bench dev cuda12 cuda13 | sha256sum)
  echo "$venv/.neojax/requirements-${key%% *}"
}

install_requirements() {
  local stamp extra missing=()
  stamp=$(requirements_stamp)
  for extra in "$@"; do is_stamped "$stamp" "$extra" || missing+=("$extra"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  requirements "$@" >"$venv/.neojax/wanted.txt"
  pip_install -r "$venv/.neojax/wanted.txt" || die "pip could not install what neojax needs"
  [ -f "$stamp" ] || rm -f "$venv/.neojax/requirements-"*
  printf '%s\n' "${missing[@]}" >>"$stamp"
}

install_neojax() {
  local key
  key=$(native_key)
  is_stamped "$venv/.neojax/native" "$key" && return
  command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    die "no C++ compiler found. On Debian: apt-get install g++"
  say "Building the native library"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps \
    --no-build-isolation --editable "$root" || die "the native library did not build: see above"
  printf '%s\n' "$key" >"$venv/.neojax/native"
}

# Whether `prepare "$@"` has to download anything.
is_installed() {
  local stamp extra
  stamp=$(requirements_stamp)
  for extra in "$@"; do is_stamped "$stamp" "$extra" || return 1; done
}

# Makes `venv` hold neojax and the extras named; quick when it does already. One at a time.
prepare() {
  mkdir -p "$root/.cache"
  (
    flock 9
    create_venv
    # CMake and Ninja of the environment, wherever the shell's own are.
    export PATH=$venv/bin:$PATH
    install_requirements "$@"
    install_neojax
  ) 9>"$root/.cache/$(basename "$venv").lock"
}
