//! The tools that the model can call for the guest. Each has a few example conversations that show when and
//! how it is used.
//!
//! A tool's result is the text for the guest, so that the answer can be built from it.

use skep_sdk::{Context, ToolError, tool};

use crate::folio::Folio;
use crate::order::{Order, in_words};

/// Maximum number of dishes per order.
const MAX_DISHES: u32 = 12;

/// Orders food or drinks from the kitchen.
#[tool(
    example(
        user = "A soup, please.",
        call = {"order": "a soup"},
        result = "a soup, 7 euros",
        answer = "With pleasure: a soup, 7 euros.",
    ),
    example(
        user = "We would like three coffees and a pizza.",
        call = {"order": "three coffees and a pizza"},
        result = "three coffees and a pizza, 24 euros",
        answer = "With pleasure: three coffees and a pizza, 24 euros.",
    ),
    example(
        user = "Please send a pizza, two teas and a soup.",
        call = {"order": "a pizza, two teas and a soup"},
        result = "a pizza, two teas and a soup, 27 euros",
        answer = "With pleasure: a pizza, two teas and a soup, 27 euros.",
    ),
    example(
        user = "Can I get two salads?",
        call = {"order": "two salads"},
        result = "two salads, 18 euros",
        answer = "With pleasure: two salads, 18 euros.",
    ),
)]
pub fn order_food(cx: &Context, order: Order) -> Result<String, ToolError> {
    let lines = order.lines();
    let dishes: u32 = lines.iter().map(|line| line.count).sum();
    if dishes > MAX_DISHES {
        let why = format!("{dishes} dishes are too many for one order, please ask for at most {MAX_DISHES}");
        return Err(why.into());
    }
    let words = in_words(&lines);
    Folio::update(cx, |folio| folio.order(lines))?;
    Ok(words)
}

/// Calls a service of the hotel.
#[tool(
    example(
        user = "I need a taxi.",
        call = {"request": "a taxi"},
        result = "a taxi",
        answer = "Of course: a taxi.",
    ),
    example(
        user = "Please clean the room tomorrow.",
        call = {"request": "room cleaning tomorrow"},
        result = "room cleaning tomorrow",
        answer = "Of course: room cleaning tomorrow.",
    ),
    example(
        user = "Could I get some towels tonight?",
        call = {"request": "fresh towels tonight"},
        result = "fresh towels tonight",
        answer = "Of course: fresh towels tonight.",
    ),
    example(
        user = "Wake me tomorrow.",
        call = {"request": "a wake-up call tomorrow"},
        result = "a wake-up call tomorrow",
        answer = "Of course: a wake-up call tomorrow.",
    ),
)]
pub fn call_service(
    cx: &Context,
    #[schemars(regex(
        pattern = r"^(a taxi|fresh towels|room cleaning|a wake-up call)( tonight| tomorrow)?$"
    ))]
    request: String,
) -> Result<String, ToolError> {
    Folio::update(cx, |folio| folio.services.push(request.clone()))?;
    Ok(request)
}

/// Reads what the guest ordered and booked so far.
#[tool(
    read_only,
    example(
        user = "What have I ordered?",
        call = {},
        result = "three coffees and a pizza, 24 euros",
        answer = "So far you have three coffees and a pizza, 24 euros.",
    ),
    example(
        user = "How much is my bill?",
        call = {},
        result = "nothing yet",
        answer = "So far you have nothing yet.",
    ),
    // These examples show messages of guests who do not want anything.
    example(
        user = "Good morning, my name is Bob.",
        answer = "Welcome to the Beehive Hotel, Bob! What may I bring you?"
    ),
    example(user = "Hi!", answer = "Hello! What may I do for you?"),
    example(user = "Thanks!", answer = "You are very welcome!"),
)]
pub fn read_folio(cx: &Context) -> Result<String, ToolError> {
    Ok(Folio::load(cx)?.in_words())
}
