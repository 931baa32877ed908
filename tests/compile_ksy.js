// Compile a Kaitai Struct description with the npm packages kaitai-struct-compiler and js-yaml.
//
//     npm install --prefix DIR kaitai-struct-compiler@0.11 js-yaml@5
//     NODE_PATH=DIR/node_modules node tests/compile_ksy.js formats/dqkv.ksy python OUT
"use strict";
const fs = require("fs");
const path = require("path");
const compiler = require("kaitai-struct-compiler");
const yaml = require("js-yaml");

const [source, language, out] = process.argv.slice(2);
compiler
  .compile(language, yaml.load(fs.readFileSync(source, "utf8")), undefined, false)
  .then((files) => {
    for (const [name, text] of Object.entries(files)) fs.writeFileSync(path.join(out, name), text);
  })
  .catch((error) => {
    console.error(String(error));
    process.exit(1);
  });
