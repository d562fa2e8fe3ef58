//! `#[agent]`: the exports of a component, and in native builds a function that returns the agent for a
//! harness.
//!
//! The attribute is on the function that handles a turn, or on a unit struct whose `instructions` say how the
//! model answers. Both become a function with the item's name that returns the `Agent`. All other generated names begin
//! with `__`, because the generated code uses names of the author and must not hide them.

use proc_macro2::TokenStream;
use quote::quote;
use syn::ext::IdentExt;
use syn::{Attribute, Error, Fields, FnArg, Ident, Item, ItemFn, ItemStruct, Result, ReturnType, Signature};
use syn::{Visibility, parse_quote, parse2};

use crate::agent_options::AgentOptions;
use crate::documentation;

/// Expands `#[agent]`. An error points to the token at fault.
pub fn expand(attributes: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let options: AgentOptions = parse2(attributes)?;
    let expected = "`#[agent]` must be on a function or, with `instructions`, on a unit struct";
    let item = parse2(item).map_err(|error| Error::new(error.span(), format!("{expected}: {error}")))?;
    match item {
        Item::Fn(function) => with_function(&options, function),
        Item::Struct(unit) => with_instructions(&options, unit),
        other => Err(Error::new_spanned(other, expected)),
    }
}

/// Expands an agent whose function handles a turn.
fn with_function(options: &AgentOptions, mut function: ItemFn) -> Result<TokenStream> {
    let name = function.sig.ident.clone();
    if let Some((option, _)) = &options.instructions {
        let message = format!(
            "`instructions` stand in place of a function: write `struct {};` instead of `fn {name}`, or remove \
             `instructions` and call `cx.conversation().system(\"…\")` in the function",
            type_name(&name)
        );
        return Err(Error::new(option.span(), message));
    }
    if let Some(option) = options.answer_options().next() {
        let message = format!(
            "`{option}` needs an agent with `instructions`: remove it, and call `cx.conversation().{option}(…)` in the \
             function"
        );
        return Err(Error::new(option.span(), message));
    }
    check_signature(&function.sig)?;
    let call = match function.sig.asyncness {
        Some(_) => quote! { #name(__cx, __message) },
        None => quote! { async move { #name(__cx, __message) } },
    };
    let attributes = std::mem::take(&mut function.attrs);
    let visibility = std::mem::replace(&mut function.vis, Visibility::Inherited);
    let (documentation, rest): (Vec<Attribute>, Vec<Attribute>) =
        attributes.into_iter().partition(|attribute| attribute.path().is_ident("doc"));
    function.attrs = rest;
    let turn = quote! {
        {
            #function

            fn __turn(
                __cx: &mut ::skep_sdk::Context,
                __message: ::skep_sdk::Message,
            ) -> ::skep_sdk::__private::Task<
                '_,
                ::core::result::Result<::skep_sdk::Reply, ::skep_sdk::AgentError>,
            > {
                ::std::boxed::Box::pin(#call)
            }

            ::skep_sdk::__private::Turn::Function(__turn)
        }
    };
    agent(options, &name, &documentation, visibility, &turn)
}

/// Expands an agent without a function: the model answers each message.
fn with_instructions(options: &AgentOptions, item: ItemStruct) -> Result<TokenStream> {
    let name = &item.ident;
    if let Some(generic) = item.generics.params.first() {
        return Err(Error::new_spanned(
            generic,
            "an agent cannot be generic, because a crate exports one agent",
        ));
    }
    if !matches!(item.fields, Fields::Unit) {
        let message = format!(
            "an agent has no fields, because it keeps nothing in memory between turns: write `struct {name};`, and keep its \
             data in `cx.state()` of its tools"
        );
        return Err(Error::new_spanned(&item.fields, message));
    }
    let Some((_, instructions)) = &options.instructions else {
        let message = "an agent without a function needs instructions for the model: \
                       `#[agent(instructions = \"You answer questions about orders.\")]`";
        return Err(Error::new(name.span(), message));
    };
    if let Some(attribute) = item.attrs.iter().find(|attribute| attribute.path().is_ident("derive")) {
        let message = "remove this: `#[agent]` turns the struct into a function that returns the agent";
        return Err(Error::new_spanned(attribute, message));
    }
    let host_tools = options.host_tools.iter().flat_map(|(_, tools)| tools);
    let [temperature, max_tokens] = [&options.temperature, &options.max_tokens].map(|option| match option {
        Some((_, value)) => quote! { ::core::option::Option::Some(#value) },
        None => quote! { ::core::option::Option::None },
    });
    let turn = quote! {
        ::skep_sdk::__private::Turn::Instructions(::skep_sdk::__private::Instructions {
            text: #instructions,
            temperature: #temperature,
            max_tokens: #max_tokens,
            host_tools: || ::std::vec![#(::skep_sdk::OfferedTool::from(#host_tools)),*],
        })
    };
    agent(options, name, &item.attrs, item.vis, &turn)
}

/// Returns the function that returns the agent, and the exports of the component.
fn agent(
    options: &AgentOptions,
    name: &Ident,
    attributes: &[Attribute],
    visibility: Visibility,
    turn: &TokenStream,
) -> Result<TokenStream> {
    let name_text = name.unraw().to_string();
    let description = documentation::text(attributes);
    if description.is_empty() {
        return Err(Error::new(
            name.span(),
            "an agent needs a doc comment, which becomes the description that people see",
        ));
    }
    let visibility = match visibility {
        Visibility::Inherited => parse_quote! { pub },
        given => given,
    };
    let (tools, calls) = (&options.tools, options.calls());
    Ok(quote! {
        #(#attributes)*
        #[allow(dead_code, non_snake_case)]
        #visibility fn #name() -> ::skep_sdk::Agent {
            const __TOOLS: &[::skep_sdk::__private::Tool] =
                &[#(<#tools as ::skep_sdk::__private::ToolFunction>::TOOL),*];

            ::skep_sdk::Agent::new(#name_text, #description, __TOOLS, #turn) #calls
        }

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            struct __Component;

            impl ::skep_sdk::__private::AgentSource for __Component {
                fn agent() -> ::skep_sdk::Agent {
                    #name()
                }
            }

            ::skep_sdk::__private::export!(__Component with_types_in ::skep_sdk::__private::bindings);
        };
    })
}

/// Returns the name of a struct for a function: `OrderDesk` for `order_desk`.
fn type_name(function: &Ident) -> String {
    let name = function.unraw().to_string();
    let capitalized = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_uppercase().chain(letters).collect::<String>())
    };
    name.split('_').filter_map(capitalized).collect()
}

fn check_signature(signature: &Signature) -> Result<()> {
    let expected =
        "an agent must be `async fn name(cx: &mut Context, message: Message) -> Result<Reply, AgentError>`";
    if let Some(generic) = signature.generics.params.first() {
        return Err(Error::new_spanned(generic, format!("{expected}, but this function has generics")));
    }
    if let Some(receiver) = signature.receiver() {
        return Err(Error::new_spanned(receiver, format!("{expected}, but this is a method")));
    }
    if signature.inputs.len() != 2 {
        return Err(Error::new_spanned(&signature.ident, format!("{expected}, with two parameters")));
    }
    if let Some(FnArg::Typed(first)) = signature.inputs.first()
        && !matches!(&*first.ty, syn::Type::Reference(_))
    {
        return Err(Error::new_spanned(
            &first.ty,
            format!("{expected}, and the first parameter must be `&mut Context`"),
        ));
    }
    if let ReturnType::Default = signature.output {
        return Err(Error::new_spanned(
            &signature.ident,
            format!("{expected}, but this function returns nothing"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_agent_expands_to_rust() {
        let expanded = expand(
            quote! { tools = [find_order, orders::cancel,] },
            quote! {
                /// Knows orders.
                async fn concierge(cx: &mut Context, message: Message) -> Result<Reply, AgentError> { body() }
            },
        )
        .unwrap();
        let file: syn::File = parse2(expanded).unwrap();
        let syn::Item::Fn(handle) = &file.items[0] else {
            panic!("the function that returns the agent comes first")
        };
        assert_eq!(handle.sig.ident, "concierge");
        assert!(handle.sig.inputs.is_empty() && matches!(handle.vis, Visibility::Public(_)));
    }

    #[test]
    fn an_agent_without_a_function_expands_to_rust() {
        let expanded = expand(
            quote! {
                instructions = "You know orders.",
                model = "qwen3-8b",
                tools = [find_order],
                host_tools = ["mcp:files/*", FIND_PARCEL],
            },
            quote! {
                /// Knows orders.
                pub(crate) struct Orders;
            },
        )
        .unwrap();
        let file: syn::File = parse2(expanded).unwrap();
        let Item::Fn(handle) = &file.items[0] else {
            panic!("the function that returns the agent comes first")
        };
        assert_eq!(handle.sig.ident, "Orders");
        assert!(matches!(handle.vis, Visibility::Restricted(_)));
    }

    #[test]
    fn each_misuse_has_a_specific_error() {
        let good =
            quote! { #[doc = "x"] async fn f(cx: &mut Context, m: Message) -> Result<Reply, AgentError> {} };
        let instructions = quote! { instructions = "You are kind." };
        for (options, item, expected) in [
            (quote! { tool = [a] }, good.clone(), "unexpected `tool`"),
            (quote! { host_tools = [A] }, good.clone(), "call `cx.conversation().host_tools(…)`"),
            (quote! { temperature = 0.5 }, good, "call `cx.conversation().temperature(…)`"),
            (quote! {}, quote! { async fn f(cx: &mut Context, m: Message) -> R {} }, "doc comment"),
            (quote! {}, quote! { #[doc = "x"] async fn f(cx: &mut Context) -> R {} }, "two parameters"),
            (
                quote! {},
                quote! { #[doc = "x"] async fn f(cx: Context, m: Message) -> R {} },
                "first parameter",
            ),
            (
                quote! {},
                quote! { #[doc = "x"] async fn f(cx: &mut Context, m: Message) {} },
                "returns nothing",
            ),
            (quote! {}, quote! { const X: u8 = 1; }, "must be on a function"),
            (quote! {}, quote! { #[doc = "x"] struct Orders; }, "needs instructions"),
            (instructions.clone(), quote! { struct Orders; }, "doc comment"),
            (
                instructions.clone(),
                quote! { #[doc = "x"] struct Orders { id: u32 } },
                "write `struct Orders;`",
            ),
            (instructions.clone(), quote! { #[doc = "x"] struct Orders<T>; }, "generic"),
            (instructions.clone(), quote! { #[doc = "x"] #[derive(Debug)] struct Orders; }, "remove this"),
            (
                instructions.clone(),
                quote! { #[doc = "x"] fn order_desk() {} },
                "write `struct OrderDesk;` instead of `fn order_desk`",
            ),
            (instructions, quote! { #[doc = "x"] mod orders {} }, "on a unit struct"),
        ] {
            let message = expand(options, item.clone()).unwrap_err().to_string();
            assert!(message.contains(expected), "{item}: {message}");
        }
    }
}
