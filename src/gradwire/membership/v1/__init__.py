"""Version 1 of the coordinator's protocol: `gradwire.proto` and the code generated from it.

Generated with an old compiler, because protobuf runtimes load code that is older than themselves and not newer:

    pip install grpcio-tools==1.49.1 "setuptools<80"
    cd src && python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
        gradwire/membership/v1/gradwire.proto
"""
