//! Has the tools, prompts and resources that the conformance suite of the Model Context Protocol asks a server for.

// The suite gives the names of the arguments.
#![allow(non_snake_case)]

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use skep_sdk::serde_json::{Value, json};
use skep_sdk::{
    AgentError, Content, Context, Elicited, Message, Reply, SampleRequest, ToolError, agent, tool,
};

/// One red pixel.
const PNG: &[u8] = &[
    0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48, 0x44, 0x52, 0x00,
    0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x01, 0x08, 0x02, 0x00, 0x00, 0x00, 0x90, 0x77, 0x53, 0xde, 0x00,
    0x00, 0x00, 0x0c, 0x49, 0x44, 0x41, 0x54, 0x08, 0xd7, 0x63, 0xf8, 0xcf, 0xc0, 0x00, 0x00, 0x03, 0x01,
    0x01, 0x00, 0x18, 0xdd, 0x8d, 0xb0, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60,
    0x82,
];
/// A sound file without samples.
const WAV: &[u8] =
    b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\0\0\0\0";

/// Returns a text.
#[tool(read_only)]
fn test_simple_text() -> String {
    "This is a simple text response for testing.".to_owned()
}

/// Returns an image.
#[tool(read_only)]
fn test_image_content() -> Content {
    Content::new().image(PNG, "image/png")
}

/// Returns audio.
#[tool(read_only)]
fn test_audio_content() -> Content {
    Content::new().audio(WAV, "audio/wav")
}

/// Returns a resource.
#[tool(read_only)]
fn test_embedded_resource() -> Content {
    Content::new().resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")
}

/// Returns a text, an image, a resource and a link.
#[tool(read_only)]
fn test_multiple_content_types() -> Content {
    Content::new()
        .text("Multiple content types test:")
        .image(PNG, "image/png")
        .resource("test://mixed-content-resource", "application/json", r#"{"test":"data","value":123}"#)
        .link("test://static-text", "static-text")
}

/// Logs three lines.
#[tool(read_only)]
async fn test_tool_with_logging(cx: &Context) -> String {
    cx.log().info("Tool execution started");
    cx.sleep(Duration::from_millis(50)).await;
    cx.log().info("Tool processing data");
    cx.sleep(Duration::from_millis(50)).await;
    cx.log().info("Tool execution completed");
    "logged".to_owned()
}

/// Reports its progress.
#[tool(read_only)]
async fn test_tool_with_progress(cx: &Context) -> Result<String, ToolError> {
    for progress in [0.0, 50.0, 100.0] {
        cx.client().progress(progress, Some(100.0), None).await?;
        cx.sleep(Duration::from_millis(50)).await;
    }
    Ok("done".to_owned())
}

/// Fails.
#[tool(read_only)]
fn test_error_handling() -> Result<String, ToolError> {
    Err("This tool intentionally returns an error for testing".into())
}

/// Asks the client's model.
#[tool(read_only)]
async fn test_sampling(cx: &Context, prompt: String) -> Result<String, ToolError> {
    let answer = cx.client().sample(SampleRequest::new(prompt, 100)).await?;
    Ok(format!("LLM response: {}", answer.text))
}

#[derive(Serialize, serde::Deserialize, JsonSchema)]
struct Contact {
    /// User's response
    username: String,
    /// User's email address
    email: String,
}

/// Asks the person at the client for a name and an address.
#[tool(read_only)]
async fn test_elicitation(cx: &Context, message: String) -> Result<String, ToolError> {
    Ok(match cx.client().elicit::<Contact>(&message).await? {
        Elicited::Accepted(contact) => format!("User response: {} at {}", contact.username, contact.email),
        Elicited::Declined => "User response: declined".to_owned(),
        Elicited::Cancelled => "User response: cancelled".to_owned(),
    })
}

/// Asks like `test_elicitation`, and then works for a while. The suite does not call it.
#[tool]
async fn elicit_and_work(cx: &Context, message: String) -> Result<String, ToolError> {
    let answer = test_elicitation(cx, message).await?;
    cx.sleep(Duration::from_secs(3)).await;
    Ok(answer)
}

async fn filled_in(cx: &Context, properties: Value) -> Result<String, ToolError> {
    let form = json!({"type": "object", "properties": properties, "required": []});
    Ok(match cx.client().elicit_form("Please fill this in", &form).await? {
        Elicited::Accepted(filled) => format!("Elicitation completed: action=accept, content={filled}"),
        other => format!("Elicitation completed: {other:?}"),
    })
}

/// Asks with default values.
#[tool(read_only)]
async fn test_elicitation_sep1034_defaults(cx: &Context) -> Result<String, ToolError> {
    let properties = json!({
        "name": {"type": "string", "description": "User name", "default": "John Doe"},
        "age": {"type": "integer", "description": "User age", "default": 30},
        "score": {"type": "number", "description": "User score", "default": 95.5},
        "status": {
            "type": "string",
            "description": "User status",
            "enum": ["active", "inactive", "pending"],
            "default": "active",
        },
        "verified": {"type": "boolean", "description": "Verification status", "default": true},
    });
    filled_in(cx, properties).await
}

/// Asks for choices of all kinds.
#[tool(read_only)]
async fn test_elicitation_sep1330_enums(cx: &Context) -> Result<String, ToolError> {
    let titled = json!([
        {"const": "value1", "title": "First Option"},
        {"const": "value2", "title": "Second Option"},
        {"const": "value3", "title": "Third Option"},
    ]);
    let properties = json!({
        "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
        "titledSingle": {"type": "string", "oneOf": titled},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": ["option1", "option2", "option3"]}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled}},
    });
    filled_in(cx, properties).await
}

/// Returns a prompt without arguments.
#[tool(read_only)]
fn simple_prompt() -> String {
    "This is a simple prompt for testing.".to_owned()
}

/// Returns a prompt with arguments.
#[tool(read_only)]
fn prompt_with_arguments(
    /// First test argument
    arg1: String,
    /// Second test argument
    arg2: String,
) -> String {
    format!("Prompt with arguments: arg1='{arg1}', arg2='{arg2}'")
}

/// Returns a prompt with a resource in it.
#[tool(read_only)]
fn prompt_with_resource(resourceUri: String) -> Content {
    Content::new()
        .resource(&resourceUri, "text/plain", "Embedded resource content for testing.")
        .text("Please process the embedded resource above.")
}

/// Returns a prompt with an image in it.
#[tool(read_only)]
fn prompt_with_image() -> Content {
    Content::new().image(PNG, "image/png").text("Please analyze the image above.")
}

/// Reads a text.
#[tool(read_only)]
fn read_text() -> String {
    "This is the content of the static text resource.".to_owned()
}

/// Reads an image.
#[tool(read_only)]
fn read_binary() -> Content {
    Content::new().image(PNG, "image/png")
}

/// Reads what belongs to an id.
#[tool(read_only)]
fn read_template(id: String) -> Value {
    json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")})
}

/// Says what it is for.
#[agent(tools = [
    test_simple_text,
    test_image_content,
    test_audio_content,
    test_embedded_resource,
    test_multiple_content_types,
    test_tool_with_logging,
    test_tool_with_progress,
    test_error_handling,
    test_sampling,
    test_elicitation,
    elicit_and_work,
    test_elicitation_sep1034_defaults,
    test_elicitation_sep1330_enums,
    simple_prompt,
    prompt_with_arguments,
    prompt_with_resource,
    prompt_with_image,
    read_text,
    read_binary,
    read_template,
])]
async fn mcp_conformance(_cx: &mut Context, _message: Message) -> Result<Reply, AgentError> {
    Ok(Reply::text("Connect the conformance suite to /mcp/NAME."))
}
