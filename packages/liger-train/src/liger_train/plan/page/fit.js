// Answers whether a setup fits, from the curves in data.models that liger_train/plan/fit.py made.
(() => {
  const GIB = 2 ** 30, MOST = 2 ** 20, UNIT = 64, LARGEST_CONFIG = 2 ** 19;
  // The texts of dropped configs, by the names of their models.
  const configs = {};
  const data = window.LIGER_FIT, form = document.getElementById("fit"), inputs = form.elements;
  const show = (id, text) => { document.getElementById(id).textContent = text; };
  const count = number => number.toLocaleString("en-US");

  function peak(curve, setup, batch, sequence) {
    const tokens = batch * sequence;
    const terms = { fixed: 1, tokens, square: sequence ** 2, squares: sequence * tokens, shard: 1 / setup.gpus };
    const values = curve.terms.map(term => terms[term]);
    const at = row => (row || []).reduce((sum, coefficient, index) => sum + coefficient * values[index], 0);
    const total = held => held.reduce((a, b) => a + b, 0);
    const lines = curve.regimes.filter(([least, shortest]) => least <= tokens && shortest <= sequence).pop()[2];
    const held = lines.map(line => line.map(at)).reduce((a, b) => (total(b) > total(a) ? b : a));
    held[data.categories.indexOf("optimizer")] += at(curve.optimizers[setup.optimizer]);
    return { held, bytes: total(held) };
  }

  // The largest number that fits, as memory grows with it.
  function largest(fits, most) {
    let low = 0, high = most + 1;
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (fits(middle)) low = middle; else high = middle;
    }
    return low;
  }

  // Tokens per second on all GPUs together, as two digits; a small step waits for the host.
  function speed(curve, setup, size) {
    const [perToken, perSquare] = curve.work, share = data.speed.shares[setup.liger];
    const rate = setup.gpus * data.examples[size][1] * share / (perToken + perSquare * setup.sequence);
    return (setup.batch * setup.sequence < data.speed.tokens ? "≤\u00a0" : "≈\u00a0") + count(Number(rate.toPrecision(2)));
  }

  function read() {
    const whole = (name, low, high) => Math.min(high, Math.max(low, Math.round(Number(inputs[name].value)) || low));
    return {
      model: inputs.model.value, method: inputs.method.value, optimizer: inputs.optimizer.value,
      gpus: Number(inputs.gpus.value), batch: whole("batch", 1, 4096), sequence: whole("sequence", UNIT, MOST),
      checkpoint: inputs.checkpoint.checked ? "full" : "none", liger: inputs.liger.checked ? "all" : "none",
    };
  }

  function command(setup) {
    const words = setup.gpus > 1 ? `torchrun --nproc-per-node ${setup.gpus} -m liger_core train` : "liger train";
    const option = (name, value, usual) => (value === usual ? "" : ` --${name} ${value}`);
    return words + option("model", setup.model) + option("batch", setup.batch, 1)
      + option("sequence", setup.sequence, 1024) + option("liger", setup.liger, "all")
      + option("precision", setup.method === "bf16" ? "bf16-pure" : "bf16", "bf16")
      + option("checkpoint", setup.checkpoint, "full") + option("optimizer", setup.optimizer, "adamw")
      + option("shard", setup.gpus > 1 ? "fsdp2" : "none", "none")
      + option("adapter", setup.method.includes("lora") ? setup.method : "none", "none");
  }

  function script(setup) {
    const lines = [
      "args = TrainingArguments(", `    per_device_train_batch_size=${setup.batch},`, `    bf16=${setup.method === "bf16" ? "False" : "True"},`,
      `    gradient_checkpointing=${setup.checkpoint === "full" ? "True" : "False"},`,
      `    optim="${setup.optimizer === "adamw" ? "adamw_torch_fused" : "adamw_bnb_8bit"}",`,
    ];
    if (setup.gpus > 1) lines.push("    fsdp=True,", '    fsdp_config={"version": 2, "reshard_after_forward": True},');
    const dtype = setup.method === "full" ? "torch.float32" : "torch.bfloat16";
    const loading = `dtype=${dtype}` + (setup.method === "qlora" ? ", quantization_config=quantized" : "");
    const quantized = 'quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",'
      + "\n    bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)";
    return [
      ...(setup.method === "qlora" ? [quantized] : []),
      `model = AutoModelForCausalLM.from_pretrained("${setup.model}", ${loading})`,
      ...(setup.method.includes("lora")
        ? ['model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))'] : []),
      ...lines, ")",
      `# Each row of the dataset has ${setup.sequence} tokens.`,
      `trainer = Trainer(model, args, train_dataset=dataset${setup.liger === "all" ? ", callbacks=[LigerCallback()]" : ""})`,
    ].join("\n");
  }

  function element(name, text, style = {}) {
    const made = document.createElement(name);
    made.textContent = text;
    Object.assign(made.style, style);
    return made;
  }

  function draw(setup, { held, bytes }) {
    const usable = Object.entries(data.cards), most = Math.max(bytes, usable.at(-1)[1] * GIB) * 1.03;
    const bar = document.getElementById("fit-bar"), legend = document.getElementById("fit-legend");
    const share = size => `${100 * size / most}%`;
    bar.replaceChildren();
    legend.replaceChildren();
    bar.setAttribute("aria-label", `${(bytes / GIB).toFixed(1)} GiB`);
    let left = 0;
    held.forEach((size, index) => {
      const name = data.categories[index], background = data.colors[name];
      if (size < 1) return;
      bar.append(element("i", "", { background, left: share(left), width: share(size) }));
      left += size;
      const item = element("li", `${name} ${(size / GIB).toFixed(2)} GiB`);
      item.prepend(element("i", "", { background }));
      legend.append(item);
    });
    for (const [size, room] of usable) {
      const mark = element("b", "", { left: share(room * GIB) });
      mark.append(element("span", size));
      bar.append(mark);
    }
  }

  function table(setup, curve, bytes) {
    show("fit-batch", `at batch ${count(setup.batch)}`);
    show("fit-sequence", `of ${count(setup.sequence)} tokens`);
    const rows = Object.entries(data.cards).map(([size, room]) => {
      const fits = (batch, sequence) => peak(curve, setup, batch, sequence).bytes <= room * GIB;
      const longest = UNIT * largest(units => fits(setup.batch, units * UNIT), MOST / UNIT);
      const batch = largest(sequences => fits(sequences, setup.sequence), 4096);
      const row = document.createElement("tr"), yes = bytes <= room * GIB;
      const name = element("th", `${size} GB `);
      name.append(element("small", data.examples[size][0]));
      row.append(name);
      const texts = [yes ? "yes" : "no", longest ? count(longest) : "–", batch ? count(batch) : "–"];
      for (const text of [...texts, yes ? speed(curve, setup, size) : "–"]) row.append(element("td", text));
      row.className = yes ? "yes" : "no";
      return row;
    });
    document.getElementById("fit-cards").replaceChildren(...rows);
    const percent = share => `${Math.round(100 * share)}\u00a0%`, { shares, rows: runs, tokens } = data.speed;
    show("fit-speed", `Tokens per second are estimated: matmuls run at ${percent(shares[setup.liger])} of the GPU's bfloat16 peak. `
      + `Of ${runs} measured runs on H200s, this differs by ${percent(data.speed.median_error)} at the median and ${percent(data.speed.largest_error)} at most. `
      + `The other GPUs are not measured. Below ${count(tokens)} tokens per GPU and step, training is slower.`);
  }

  // Asks the server for a curve, and shows a text until it is there.
  async function plan(model, name) {
    const curves = data.models[model], body = JSON.stringify({ name, config: configs[model] ?? null });
    curves[name] = { problem: "Planning this combination takes a few seconds …" };
    try {
      const reply = await fetch("/", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      curves[name] = await reply.json();
    } catch (error) {
      curves[name] = { problem: `No answer from \`liger plan --serve\`; start it again and reload this page (${error.message}).` };
    }
    answer();
  }

  // Adds the model of a config.json.
  async function add(file) {
    if (!data.served) {
      show("fit-problem", "This page has no planner. For your own config, run `liger plan --model path/to/folder --serve`.");
      return;
    }
    let config = {};
    const text = file.size > LARGEST_CONFIG ? "" : await file.text();
    try { config = JSON.parse(text); } catch { /* The text is no JSON. */ }
    if (typeof config?.model_type !== "string") {
      show("fit-problem", `${file.name} must be the config.json of a model: a JSON object with "model_type".`);
      return;
    }
    const name = `path/to/${config.model_type}`;
    if (!data.models[name]) inputs.model.append(new Option(name));
    show("fit-problem", "");
    data.models[name] = {};
    configs[name] = text;
    inputs.model.value = name;
    answer();
  }

  function answer() {
    const setup = read(), sharded = setup.gpus > 1 ? "fsdp2" : "none";
    const name = [setup.method, setup.checkpoint, setup.liger, sharded].join("/"), curves = data.models[setup.model];
    if (!curves[name] && data.served) plan(setup.model, name);
    const curve = curves[name] ?? { problem: `No plan of this combination for ${setup.model}.` };
    document.getElementById("fit-result").hidden = Boolean(curve.problem);
    show("fit-missing", curve.problem ?? "");
    history.replaceState(null, "", `#${new URLSearchParams(setup)}`);
    if (curve.problem) return;
    const result = peak(curve, setup, setup.batch, setup.sequence);
    const parameters = `${(curve.parameters / 1e9).toFixed(2)} billion parameters`;
    show("fit-peak", `${(result.bytes / GIB).toFixed(2)} GiB${setup.gpus > 1 ? " on each GPU" : ""} at the peak; ${parameters}`);
    draw(setup, result);
    table(setup, curve, result.bytes);
    show("fit-command", command(setup));
    show("fit-arguments", script(setup));
  }

  for (const name of Object.keys(data.models)) inputs.model.append(new Option(name));
  // Models are sorted by size: one of medium size shows more of the bar.
  inputs.model.selectedIndex = Math.floor(inputs.model.length / 2);
  for (const gpus of data.gpus) inputs.gpus.append(new Option(gpus === 1 ? "1" : `${gpus}, FSDP2`, gpus));
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (!inputs[name]) continue;
    if (inputs[name].type === "checkbox") inputs[name].checked = value !== "none"; else inputs[name].value = value;
    if (inputs[name].selectedIndex === -1) inputs[name].selectedIndex = 0;
  }
  form.addEventListener("input", answer);
  form.addEventListener("submit", event => event.preventDefault());
  inputs.config.parentElement.hidden = !data.served;
  inputs.config.addEventListener("change", () => add(inputs.config.files[0]));
  document.addEventListener("dragover", event => event.preventDefault());
  document.addEventListener("drop", event => {
    event.preventDefault();
    if (event.dataTransfer.files.length) add(event.dataTransfer.files[0]);
  });
  answer();
})();
