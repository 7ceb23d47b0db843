"""Status codes of gRPC calls."""

import grpc

from outrider.transport.channel import Trust, open_channel


async def code_of(
    address: str, trust: Trust, path: str, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.StatusCode:
    """The final status of a call with one empty message. OK if the call goes on."""
    async with open_channel(address, trust) as channel:
        call = channel.unary_stream(path, None, None)(b"", timeout=10, metadata=metadata)
        try:
            async for _ in call:
                if path.endswith("/Watch"):
                    return grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK
