"""Version 1 of the coordinator's protocol: `gradwire.proto` and the code generated from it.

It is generated with an old compiler, because a protobuf runtime only loads code that is not newer than itself:

    pip install grpcio-tools==1.49.1 "setuptools<80"
    cd src && python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
        gradwire/membership/v1/gradwire.proto
"""
