# Sourced by scripts/test: lint, types and the C++ tests. Runs in the root, inside the environment.

step() { printf '\n== %s\n' "$*"; }

# C++ of this repository: not what it carries from others.
native_sources() { git ls-files 'ffi/*.h' 'ffi/*.cc' | grep -v /third_party/; }

build_files() { git ls-files 'BUILD' '*/BUILD' '*/BUILD.bazel' '*.bzl' 'MODULE.bazel'; }

check_format() {
  step "ruff"
  ruff check .
  ruff format --check .
  step "clang-format"
  native_sources | xargs -r clang-format --dry-run -Werror
  if command -v npx >/dev/null; then
    step "buildifier"
    build_files | xargs -r npx --yes @bazel/buildifier@8.2.1 -mode=check
  fi
}

# Type checkers do not see through an editable install that models/ is neojax.models, so they get a
# copy laid out as the package is installed. What they say names the files in the tree.
check_types() {
  step "pyright"
  local copy=build/types
  rm -rf $copy
  mkdir -p $copy
  cp -r neojax $copy/neojax
  cp -r models $copy/neojax/models
  python - >$copy/pyrightconfig.json <<'PY'
import json
import tomllib

with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)["tool"]["pyright"]
print(json.dumps(settings | {"include": ["neojax"]}))
PY
  pyright --project $copy --pythonpath "$(command -v python)" |
    sed "s#$PWD/##; s#$copy/neojax/models/#models/#; s#$copy/##"
}

check_native() {
  step "ctest"
  mkdir -p build
  cmake -S . -B build/native -G Ninja >build/native.log || { cat build/native.log && return 1; }
  cmake --build build/native
  ctest --test-dir build/native --output-on-failure --no-tests=error
}
