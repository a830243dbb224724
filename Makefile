# `make serve` and `make test` do everything from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/rpc/v1/*.proto)

.PHONY: generate
generate:  ## regenerate rpc/v1 from proto/
	rm -f rpc/v1/*_pb2*.py rpc/v1/*_pb2*.pyi
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)
