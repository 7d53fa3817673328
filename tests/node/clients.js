// The vendors' clients for Node: asks each question twice in every way, and prints text, header and whether it ended.
// node clients.js URL MODEL QUESTION...
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, model, ...questions] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "node", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "node", maxRetries: 0 });

const said = (content) => [{ role: "user", content }];
const sampling = { model, temperature: 0, max_tokens: 16 };
const response = { model, temperature: 0, max_output_tokens: 16, store: false };

async function joined(stream, piece) {
  let text = "";
  let ended = false;
  for await (const event of stream) {
    const [more, end] = piece(event);
    text += more ?? "";
    ended ||= Boolean(end);
  }
  return [text, ended];
}

const ways = {
  chat: [
    (q) => openai.chat.completions.create({ ...sampling, messages: said(q) }),
    ({ choices: [one] }) => [one.message.content, one.finish_reason === "stop"],
  ],
  "chat, streamed": [
    (q) => openai.chat.completions.create({ ...sampling, messages: said(q), stream: true }),
    (stream) => joined(stream, ({ choices: [one] }) => [one?.delta.content, one?.finish_reason === "stop"]),
  ],
  responses: [
    (q) => openai.responses.create({ ...response, input: q }),
    (answer) => [answer.output_text, answer.status === "completed"],
  ],
  "responses, streamed": [
    (q) => openai.responses.create({ ...response, input: q, stream: true }),
    (stream) => joined(stream, (event) => [
      event.type === "response.output_text.delta" ? event.delta : "", event.type === "response.completed",
    ]),
  ],
  messages: [
    (q) => anthropic.messages.create({ ...sampling, messages: said(q) }),
    (answer) => [answer.content[0].text, answer.stop_reason === "end_turn"],
  ],
  "messages, streamed": [
    (q) => anthropic.messages.create({ ...sampling, messages: said(q), stream: true }),
    (stream) => joined(stream, (event) => [event.delta?.text, event.delta?.stop_reason === "end_turn"]),
  ],
};

const found = {};
for (const [name, [ask, read]] of Object.entries(ways)) {
  found[name] = [];
  for (const question of questions) {
    const answers = [];
    for (const _ of [1, 2]) {
      const { data, response } = await ask(question).withResponse();
      answers.push([...(await read(data)), response.headers.get("x-semkv")]);
    }
    found[name].push(answers);
  }
}
console.log(JSON.stringify(found));
