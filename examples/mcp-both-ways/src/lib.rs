//! A librarian that uses a tool of an MCP server, and is itself one: every host serves its agents and their tools to
//! MCP clients at `/mcp`, here as `mcp-both-ways` and `mcp-both-ways__where_is`.

use serde::{Deserialize, Serialize};
use skep_sdk::serde_json::Value;
use skep_sdk::{
    AgentError, Context, HostTool, HostToolError, Message, Output, Reply, ToolChoice, ToolError, agent, tool,
};

/// Arguments of the server's tool.
#[derive(Serialize, Deserialize)]
struct FindBook {
    title: String,
}

/// The structured result of the server's tool.
#[derive(Serialize, Deserialize)]
struct Place {
    shelf: u32,
}

const FIND_BOOK: HostTool<FindBook, Place> = HostTool::new("mcp:library/find_book");

/// Number of shelves on each floor.
const SHELVES_PER_FLOOR: u32 = 10;

/// Tells on which floor and shelf of the library a book is.
#[tool(
    read_only,
    example(
        user = "Where do I find Middlemarch?",
        call = {"title": "Middlemarch"},
        result = "Middlemarch is on floor 2, shelf 24",
        answer = "Middlemarch is on floor 2, shelf 24.",
    ),
    example(
        user = "Do you have Ulysses?",
        call = {"title": "Ulysses"},
        result = "Ulysses is on floor 0, shelf 3",
        answer = "Ulysses is on floor 0, shelf 3.",
    ),
)]
async fn where_is(
    cx: &Context,
    /// Title of the book.
    #[schemars(regex(pattern = "^[A-Z][A-Za-z ]{1,40}$"))]
    title: String,
) -> Result<String, ToolError> {
    match FIND_BOOK.call(cx, FindBook { title: title.clone() }).await {
        Ok(Place { shelf }) => {
            Ok(format!("{title} is on floor {}, shelf {shelf}", shelf / SHELVES_PER_FLOOR))
        }
        // The server's own error is a fact for the model; `?` passes any other error on as its text.
        Err(HostToolError::Failed(why)) => Err(why.into()),
        Err(error) => Err(error.into()),
    }
}

/// Tells visitors of a library where the books are.
#[agent(tools = [where_is])]
async fn librarian(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    cx.conversation()
        .system("You tell visitors of a library where the books are. Answer in one short sentence.")
        .user(message.text)
        // Every message is about one book, so the code names the tool. A model of the default's size decides badly by itself.
        .tool_choice(ToolChoice::named("where_is"))
        // The answer repeats what the tool returned.
        .answer_format(|results| match results {
            [Ok(Value::String(done))] => Output::Regex(format!("{done}\\.")),
            _ => Output::Regex("I am sorry, we do not have that book\\.".to_owned()),
        })
        .temperature(0.0)
        .max_tokens(80)
        .run()
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_sdk::serde_json::json;
    use skep_sdk::testing::{Harness, ScriptedModel};

    #[test]
    fn the_shelf_of_the_server_becomes_a_floor() {
        let mut harness = Harness::new(librarian).typed_host_tool(FIND_BOOK, |_| Ok(Place { shelf: 31 }));
        let place = harness.call_tool("where_is", json!({"title": "Dracula"})).unwrap();
        assert_eq!(place, "Dracula is on floor 3, shelf 31");
    }

    #[test]
    fn the_model_reads_the_error_of_the_server() {
        let model =
            ScriptedModel::new().call("where_is", json!({"title": "Faust"})).text("We do not have it.");
        let missing = |_| Err(HostToolError::Failed("the library has no book 'Faust'".into()));
        let mut harness = Harness::new(librarian).model(model).typed_host_tool(FIND_BOOK, missing);
        let outcome = harness.send("Where is Faust?").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, Err("the library has no book 'Faust'".to_owned()));
    }
}
