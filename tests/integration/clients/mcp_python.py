"""Uses the reference client of the Model Context Protocol for Python with an agent of a Skep host: URL -> exit code 0 and "all checks passed"."""
import asyncio
import sys

from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client

logged, updated = [], []


async def elicit(context, params):
    assert "name" in params.message, params
    return types.ElicitResult(action="accept", content={"username": "ada", "email": "ada@example.com"})


async def sample(context, params):
    text = params.messages[0].content.text
    return types.CreateMessageResult(role="assistant", content=types.TextContent(type="text", text=text.upper()), model="test")


async def log(params):
    logged.append(params.data)


async def check(session):
    await session.initialize()
    tools = {tool.name: tool for tool in (await session.list_tools()).tools}
    assert "test_sampling" in tools, list(tools)

    text = await session.call_tool("test_simple_text", {})
    assert text.content[0].text == "This is a simple text response for testing.", text
    image = await session.call_tool("test_image_content", {})
    assert image.content[0].type == "image", image
    failed = await session.call_tool("test_error_handling", {})
    assert failed.model_dump(by_alias=True)["isError"], failed

    seen = []

    async def progress(progress, total, message):
        seen.append((progress, total))

    await session.call_tool("test_tool_with_progress", {}, progress_callback=progress)
    assert seen == [(0, 100), (50, 100), (100, 100)], seen
    answer = await session.call_tool("test_sampling", {"prompt": "bees"})
    assert answer.content[0].text == "LLM response: BEES", answer
    form = await session.call_tool("test_elicitation", {"message": "What is your name?"})
    assert form.content[0].text == "User response: ada at ada@example.com", form
    await session.call_tool("test_tool_with_logging", {})

    prompts = [prompt.name for prompt in (await session.list_prompts()).prompts]
    assert "test_prompt_with_arguments" in prompts, prompts
    prompt = await session.get_prompt("test_prompt_with_arguments", {"arg1": "one", "arg2": "two"})
    assert "arg1='one'" in prompt.messages[0].content.text, prompt
    resources = [str(resource.uri) for resource in (await session.list_resources()).resources]
    assert "test://static-text" in resources, resources
    read = await session.read_resource("test://template/7/data")
    assert "Data for ID: 7" in read.contents[0].text, read
    await session.subscribe_resource("test://watched-resource")
    await session.unsubscribe_resource("test://watched-resource")


async def main():
    async with streamable_http_client(sys.argv[1]) as streams:
        async with ClientSession(*streams[:2], elicitation_callback=elicit, sampling_callback=sample,
                                 logging_callback=log) as session:
            await check(session)
            for _ in range(50):
                if len(logged) >= 3:
                    break
                await asyncio.sleep(0.1)
            assert logged[-3:] == ["Tool execution started", "Tool processing data", "Tool execution completed"], logged
    print("all checks passed")


asyncio.run(main())
